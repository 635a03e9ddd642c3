"""Captured steps as step machines, as they were built: marks, bases, programs and the account.

The model has one class for each role, a world with the memory and the channels, and a search that takes actions at
random and kills processes at any moment. It imports nothing of the project. Read README.md first: it has the words and
the rules in tables.
"""
