"""Code shared by the scripts, one subject per module.

train_gpt2.py   settings: flags, presets and their precedence; ranks: the processes of a run;
                devices: device and precision; muon: an optimizer; progress: console output
log/            run_folder: everything a run reads, writes and deletes there; run_files: log.txt and
                run.json; checkpoints: step_*/; scripts: code/; plots: curves.png; trackers:
                TensorBoard and Weights & Biases
models          huggingface: loading and saving; peer_checkpoints: .pt files of build-nanogpt and
                nanoGPT; forks: is a model a GPT-2?; functional_gpt2: the reference GPT-2; sampling:
                logits for generate(), and samples of a run
data            documents: text for fineweb.py; shards: tokens for the data loader; tokenizer:
                vocabularies (gpt2/: OpenAI's, under a modified MIT license), and bits per byte
every script    command_line: flags and console output; errors_and_signals: one-line errors, stop
                signals, exit status; files_and_locks: atomic writes, and a lock"""
