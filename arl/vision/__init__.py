"""What a model with a vision tower makes of images, for all who show it some: workflows, servers and the trainer.

processor.py    files to pixels, the number of an image's placeholders, and the positions of tokens around images
"""
