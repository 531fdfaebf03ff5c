"""Decoding across a link: the edge drafts, the cloud verifies.

Neither half sleeps, waits or opens a socket: both take messages and the time, and give messages.
``virtual.py`` drives them with a virtual clock, a transport drives the very same objects.
"""
