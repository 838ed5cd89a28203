"""One training job, as it is divided, run and measured."""

import logging

# transformers and peft import it, and on some processors it asks for a package of kernels that only serve.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
