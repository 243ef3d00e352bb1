"""The recipe behind `shardwise train`.

Reading order: `config` (the keys), `text` (documents to one token stream), `checks` (what would
stop a run), `windows` (which tokens a step sees), `decoder` (the model), `schedule` (the learning
rate), `metrics` (what a run tells), `launch` (local ranks, signals), `summary` (what a run came
to), `setup` (all of it made ready), `saves` (checkpoints, and how a run goes on), `replay` (a step
computed twice), `loop` (the steps).
"""
