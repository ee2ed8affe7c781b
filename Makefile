# The commands of this repository; each says more in the script that it calls.
.DEFAULT_GOAL := help
.PHONY: help demo test test-engines bench fmt fuzz wheel clean-caches

ARGS ?=
SECONDS ?= 60

help: ## Lists the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Plays the measured story on two simulated engines (ARGS="--json")
	@scripts/demo.sh $(ARGS)

test: ## Runs every check and counts the tests (STEPS="lint core")
	@scripts/test.sh $(STEPS)

test-engines: ## Tests against real vLLM servers, installed on the first run
	@KVLANE_ENGINES=1 scripts/test.sh engines

bench: ## Measures beside the peers, into benches/RESULTS.md (QUICK=1 JSON=out.json: smaller, JSON alone)
	@scripts/bench.sh $(ARGS)

fmt: ## Formats the sources
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml
	cargo fmt --manifest-path benches/Cargo.toml

fuzz: ## Fuzzes every target (SECONDS=60), runs the models of threads one switch deeper, and the thread sanitizer
	@scripts/fuzz.sh $(SECONDS)
	@scripts/loom.sh 3
	@scripts/sanitize.sh

wheel: ## Builds the release wheel into target/wheels
	@scripts/wheel.sh

clean-caches: ## Removes environments, wheels, corpora and the vLLM installation
	@scripts/clean-caches.sh
