"""What everything else in the package stands on: the context, handles, values, devices, options."""
