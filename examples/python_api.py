"""The bundled demo model from Python. Give your own checkpoint: python examples/python_api.py DIR"""

import sys

from echo_batch import Engine, SamplingParams

facts = "The number of bagel is #04007. The number of elevator is #77304. The number of wombat is #03652.\n"
prompts = [f"{facts}Question: What is the number of {x}?\nAnswer: The number of {x} is #" for x in ("wombat", "bagel")]
with Engine(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine:
    for completion in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(prompts[completion.row_id].splitlines()[-1], "->", completion.text, f"({completion.finish_reason})")
