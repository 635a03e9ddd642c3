"""The language of Central Storage: records, codec, errors, segment names and what a reduction means.

No socket, no clock, no device. Every other package speaks through this one and none is known here.
"""
