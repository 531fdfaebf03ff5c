"""Edge and cloud: links, draft lengths, sessions and their messages, gRPC server and client."""
