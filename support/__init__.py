"""What the scripts share. Each module has one subject:

train_gpt2.py   settings: where a value comes from; ranks: the processes of a run; devices: device
                and precision; muon: the optimizer; progress: what a run prints
log/            run_folder: what a run finds, writes and deletes there; run_files: log.txt and
                run.json; checkpoints: step_*/; scripts: code/; plots: curves.png; trackers:
                TensorBoard and Weights & Biases
models          huggingface: their files; forks: is a model a GPT-2?; functional_gpt2: what a GPT-2
                computes; sampling: the logits that are sampled from
data            documents: what fineweb.py reads; shards: what the data loader reads; tokenizer:
                vocabularies (gpt2/: OpenAI's, modified MIT), and bits per byte
every script    command_line: flags, and lines on the console; errors_and_signals: errors of one
                line, stop signals, exit status; files_and_locks: files that appear whole or not at
                all, and a lock"""
