"""gRPC plumbing that knows no role: servers, channels, the cluster secret, and a worker's compute thread."""
