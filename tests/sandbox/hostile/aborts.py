"""Dies of an abort."""

import os

os.abort()
