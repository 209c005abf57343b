"""The engines behind the routes: their models, and the requests that run in them."""
