#!/bin/sh
# The tables in docs/ about the embedded model, each by the command that prints it; an hour on two cores.
#
#     PATH=.venv/bin:$PATH sh bench/tables.sh emma.txt OUT      # emma.txt: the whole novel, which the model was not trained on
#
# OUT/NAME.txt is what a command printed; what is there is not measured again. Times come first: leave the machine alone.
set -eu
text=$1 out=$2
small=longheads,chunk_size=16
paper=longheads,chunk_size=32,representation=attention,select=head,position=packed,n_recent=1,n_neighbor=0
votes=corm,window=64,recent=64
mkdir -p "$out"

table() {
    name=$1
    shift
    [ -e "$out/$name.txt" ] && return
    echo "$name: $*"
    "$@" > "$out/part" 2> "$out/$name.err"
    mv "$out/part" "$out/$name.txt"
}

# NAME "METHOD ..." COMMAND...: the command with --method before each of the methods
each() {
    name=$1 methods=$2
    shift 2
    for method in $methods; do
        set -- "$@" --method "$method"
    done
    table "$name" "$@"
}

accuracy="python bench/accuracy.py $text --json $out/accuracy.jsonl"  # keeps what it has measured
last="pylongctx eval perplexity -f $text --mode last --chunks 12"
every="$votes,evict_every"
rows="$every=1 $every=16 $every=32 $every=64 $every=128 $every=256 full"

# Benchmark, CORM's times
table bench pylongctx bench -n 64 -d 0,4096 --method full --method longheads
each evict-times "$rows" pylongctx bench -t 1 -p 4096 -n 0
each evict-tokens "$rows" pylongctx bench -t 1 -p 0 -n 64 -d 4096

# Three commands, Measured, Evaluate
each passkeys "full selfextend longheads" pylongctx eval passkey --lengths 512,1024,2048,4096,8192 --limit 50
each measured "full selfextend window" $last --lengths 512,4096
each needle "full longheads" pylongctx eval needle --passkey --context-lengths 300,900,1500 --predict 8 \
    --final-context-length-buffer 80 --document-depth-percent-intervals 4

# LongHeads
table parts $accuracy --lengths 8192 --tests 20 --haystacks novel
each options "$small,n_recent=0 $small,n_recent=2 $small,n_neighbor=0 \
    $small,n_neighbor=3 $small,window=384" $accuracy --lengths 8192 --tests 20 --haystacks novel
each far "$small longheads,chunk_size=32" $accuracy --lengths 32768 --tests 10 --haystacks novel --passages 0
each borders "longheads,n_neighbor=0 longheads,n_neighbor=1" $accuracy --lengths 16384 --tests 20 --haystacks novel --passages 0
each keys "longheads $paper" $accuracy --lengths 512,1024,2048,4096,8192 --tests 20 --passages 0
each keys-far "longheads $paper" $accuracy --lengths 16384,32768 --tests 10 --passages 0
each keys-others "full window selfextend dca full@ntk full@yarn" $accuracy --lengths 512,1024,2048,4096,8192 --tests 5 --passages 0
each ntk "longheads longheads@ntk4" $accuracy --lengths 4096 --tests 20 --haystacks novel --passages 0
each perplexity "full selfextend window dca longheads $paper" $last --lengths 512,8192

# CORM
rules=
for budget in 320,recent=80 240,recent=60; do
    rules="$rules h2o,budget=$budget,evict_every=16 scissorhands,budget=$budget,evict_every=16 tova,budget=${budget%,*},evict_every=16"
done
for window in 128 64 32 16 8; do
    rules="$rules corm,window=$window,recent=$window"
done
each corm "full window,n_sink=4,window=236 $rules corm,window=32,recent=32,evict_every=32 corm,window=32,recent=32,evict_every=1 \
    corm,window=16,recent=16,evict_every=16 corm,window=8,recent=64,evict_every=16" \
    $accuracy --lengths 500 --tests 20 --haystacks novel --passages 8
each evict "$rows" $accuracy --lengths 500 --tests 20 --haystacks novel --passages 8
rules=
for base in longheads selfextend; do
    rules="$rules $base $base+corm,window=512,recent=512 $base+corm,window=256,recent=256 $base+corm,window=128,recent=128"
    for rule in h2o scissorhands tova; do
        rules="$rules $base+$rule,budget=1536"
    done
done
each corm-far "$rules" $accuracy --lengths 4096 --tests 20 --haystacks novel --passages 5
table held pylongctx inspect --method $votes --what compression --length 4096 --text "$text" --out "$out"
table sparsity pylongctx inspect --what sparsity --length 512 --text "$text" --out "$out"

# Pictures
table chunkmap pylongctx inspect --haystack "$text" --method longheads,chunk_size=32,select=head --length 4096 --trial 1 --out "$out"
table kept pylongctx inspect --method $votes --what kept --haystack "$text" --length 512 --out "$out"

# GPUs
table offload python bench/offload.py --text "$text" --tokens 8192,32768 --slots 1,2,4,8
