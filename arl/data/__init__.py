"""Datasets: rows by index, from files, the hub, or whatever a user has; their columns, checked, renamed or computed.

| module | what lives there |
|---|---|
| loading | load_dataset and load_splits: the hub, directories, files; a user's own datasets, checked |
| lazy_rows | rows that are made when they are read, streams in chunks; whether a dataset is the one that it was |
| image_processor | images to pixels, the number of an image's placeholders, the positions of tokens around images |

May import arl.api. The event loop of a run, workflows, servers and the trainer all use it.
"""
