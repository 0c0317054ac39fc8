"""The text of a model as HTML in which nothing is active, for the page of the server."""
