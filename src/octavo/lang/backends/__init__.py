"""Where programs run: the engine in this process, an Octavo server, any OpenAI-compatible endpoint."""
