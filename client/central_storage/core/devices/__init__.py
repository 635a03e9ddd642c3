"""Device names, arrays on several devices of a replica, and where a new array is placed."""
