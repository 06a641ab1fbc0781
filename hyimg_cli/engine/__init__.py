"""One job's story and one session: the rooms below put together."""
