"""HTTP between our processes: messages, the client's connection, and the front door before a server."""
