"""Captured steps as step machines: the design of what decision 32 leaves to build, which the code must follow.

Returns go by words in shared memory (the board), and the server decides, commits and answers such steps by a *pass*,
without its engine. Everything else goes as before. The model has one class for each role, a world with the memory and
the channels, and a search that takes actions at random and kills processes at any moment. It imports nothing of the
project. Read README.md first: it has the rules in a table.
"""
