"""All that the engine knows: tables in the control log, and what is derived from them."""
