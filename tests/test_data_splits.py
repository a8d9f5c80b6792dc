"""Which split a document goes to."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isoloco.data import splits
from isoloco.data.splits import Document, Splitter, key_of


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 9)), max_size=25), st.randoms(), st.data())
def test_held_splits_do_not_depend_on_the_order(entries, random, data):
    valid, test = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    documents = [Document(key, index, 0, None, size) for index, (key, size) in enumerate(entries)]
    shuffled = documents[:]
    random.shuffle(shuffled)
    splitter = Splitter(valid=valid, test=test)
    train = [d.index for document in shuffled for split, d in splitter.place(document)]
    held = {split: [d.index for d in held.documents] for split, held in splitter.held.items()}
    rest = sorted(documents, key=lambda d: (d.key, d.index))
    expected = {}
    for split, size, end in (("valid", valid, 0), ("test", test, -1)):
        taken = []
        while rest and sum(d.size for d in taken) < size:
            taken.append(rest.pop(end))
        expected[split] = sorted(d.index for d in taken)
    assert held == expected
    assert sorted(train) == sorted(d.index for d in rest)


def test_keys_are_uniform():
    keys = np.array([key_of(f"document {i}", 0) for i in range(4000)])
    counts, _ = np.histogram(keys, 20, (0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 45  # 19 degrees of freedom
    assert splits.key_of("a", 1) != splits.key_of("a", 2)
