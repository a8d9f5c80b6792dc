"""What the command `torchft_lighthouse` runs, begun when a line is sent to it: its imports take seconds."""

import sys

from torchft._torchft import lighthouse_main

if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    lighthouse_main()
