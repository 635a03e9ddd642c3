"""Step times: the rings of all processes of a service, and the timeline that is made of them."""
