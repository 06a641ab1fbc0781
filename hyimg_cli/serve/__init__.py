"""`hyimg serve`: batches and single requests over HTTP, in the shapes of OpenAI's API."""
