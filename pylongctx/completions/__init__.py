"""Text completion: requests become jobs of an engine, and tokens become OpenAI's dicts."""
