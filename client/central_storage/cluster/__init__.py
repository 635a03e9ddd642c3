"""Workers on other machines: what the gateway and an outpost say to each other, and the bytes that go with it."""
