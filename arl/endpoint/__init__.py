"""The OpenAI- and Anthropic-compatible endpoint, and workflows whose programs call it.

| module | what lives there |
|---|---|
| proxy, exchange | OpenAIProxy: the HTTP server; one request of an episode |
| session | one episode behind the endpoint: its URL and key, the record of its calls |
| chat, responses, anthropic | the protocols: from a request to a call, and from answers to a response |
| calls | what they share: a call, the grammar and the parts of its answer |
| sdk_workflow | programs that arl starts |
| served_workflow | programs that arl does not start (`arl serve`) |
| verifiers_workflow | environments of the verifiers package |
"""
