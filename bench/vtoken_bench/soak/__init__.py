"""The soak: a server under thousands of requests, some cut off, some bad, and with too few blocks."""
