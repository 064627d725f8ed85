"""Generation over HTTP: SGLang's native /generate and OpenAI's routes, the same for every dialect."""
