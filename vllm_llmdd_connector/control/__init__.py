"""Control plane: typed messages between the engines of a prefill and a decode server."""
