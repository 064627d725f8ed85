"""HTTP in front of a fleet: dialects that trainers speak already, as tables of routes onto the SDK.

A dialect (:mod:`.dialect`) is routes, a codec for errors and settings; each is a file of :mod:`.dialects`. A request is
a :class:`.call.Call`: its body is read by :mod:`.bodies`, who asks and under which id by :mod:`.identity`.
:mod:`.server` listens, runs one dialect and drains at its end; :mod:`.middleware` are the classes that users put around
routes; :mod:`.generation` are the routes that generate, for every dialect. What is decided is decided by the
coordinator and the stages: nothing here holds state of the fleet's.
"""
