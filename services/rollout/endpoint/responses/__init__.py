"""OpenAI's responses: requests read, answers written, and kept for the requests that continue them."""
