"""The gateway of one service: a process that admits observers from other machines, over TCP with CURVE."""
