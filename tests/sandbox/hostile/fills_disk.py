"""Writes files until there is no room."""

number = 0


def fill():
    global number
    while True:
        with open(f"/tmp/{number}", "wb") as file:
            file.write(b"x" * (1 << 20))
        number += 1


attempt("disk", fill)
print("files", number)
