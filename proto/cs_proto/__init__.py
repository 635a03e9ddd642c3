"""The language of Central Storage: records, codec, errors, segment names, and the meaning of a reduction.

No socket, no clock, no device. Every other package uses this one, and this one knows none of them.
"""
