"""Takes over pid 1, which would outlive it, or reads the output of other processes from the pipe of pid 1."""

attempt("its memory", open, "/proc/1/mem", "r+b")
attempt("its threads' memory", open, "/proc/1/task/1/mem", "r+b")
attempt("its pipe", open, "/proc/1/fd/1")
attempt("where it is", open, "/proc/1/maps")
