"""The generating routes, equal in every dialect: SGLang's ``/generate`` and OpenAI's completions and chats.

Decides which requests are forwarded to the data ports of stages. For other requests, decides how fields become requests
and how samples become replies and events.

Imports: gateway.backend, gateway.http, rollout, sglang_api, contract, runtime.

Start with ``routes.py`` (``routes``), ``passthrough.py`` (``passing``), ``sglang.py`` (``generate``) and ``openai.py``
(``completions``, ``chat``). ``samples.py`` runs the samples of a call concurrently.
"""
