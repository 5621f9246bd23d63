"""Makes empty files."""

number = 0
while True:
    os.mkdir(f"/tmp/{number}")
    number += 1
