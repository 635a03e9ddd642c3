"""The base of the whole package: the context, handles, values, devices, options."""
