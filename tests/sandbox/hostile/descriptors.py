"""Opens as many files as it can."""

files = []
attempt("descriptors", lambda: [files.append(os.dup(1)) for _ in range(100_000)])
print("opened", len(files) < 200)
