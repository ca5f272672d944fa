"""Limits of our HTTP servers on the size of requests and the time for them.

The key server.max_request_bytes sets the largest tensors of a request; exchange.py refuses a larger body.
"""

CHUNK_BYTES = 2**18
BUFFER_BYTES = 2**24
HTTP_HEAD_BYTES = 16 * 2**10
HTTP_HEAD_S = 10.0
"""Seconds within which an unauthenticated connection must send a whole head, TLS handshake included."""
IDLE_S = 600.0
"""Seconds that an authenticated connection may stay idle between requests."""
STRANGERS = 256
STRANGERS_PER_ADDRESS = 64
"""Maximum number of unauthenticated connections, in all and per address. A new one replaces the oldest."""
BODY_S = 30.0
SLOWEST_LINK = 2**18
"""Bytes per second. A body may take BODY_S seconds plus its transfer time at this rate."""
TENSOR_HEAD_BYTES = 64 * 2**10
JSON_BODY_BYTES = 2**20
"""Largest request without binary tensors, or to an endpoint that takes only JSON."""
UNREAD_BYTES, UNREAD_S = 2**20, 1.0
"""Limits on reading a refused body. A server reads some of it so that the client can read the answer."""
