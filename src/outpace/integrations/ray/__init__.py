"""``outpace serve --replicas``: servers on one machine or many, under Ray Serve.

Every replica is a whole ``outpace serve`` that a Ray actor starts and watches (``replica``). Ray decides how many
there are, restarts and drains them; ``router`` lets it choose by prompts that begin alike (``routing``). The
``ingress`` talks HTTP to the server that it was given a lease of, keeps the token ids it has delivered
(``delivered``), and lets another go on with an answer whose server is lost.
"""
