# What a contributor runs. `make help` lists it.

# Tools, pinned; go run fetches each once, into the module cache.
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOFUMPT     = mvdan.cc/gofumpt@v0.12.0
GOVULNCHECK = golang.org/x/vuln/cmd/govulncheck@v1.9.0
VULNDB      = https://vuln.go.dev

# Tests repeat what they are about this often: 0 for the full figures.
TIDEMARK_ROUNDS ?= 1
# Packages tested at once: each may start servers of its own.
PACKAGES ?= 1
# Where the servers of tests keep their data: in memory if there is plenty, else on disk.
TIDEMARK_DATA ?= $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 6e6 {print "/dev/shm"}')
# Where a demo's projection keeps its model, where there is a choice: postgres or mongodb.
SINK ?=

.DEFAULT_GOAL := help
.PHONY: help test test-rebuilds test-faults test-packages test-client demo demo-rollup demo-search bench bench-rebuild lint vet format staticcheck tidy vuln services-up services-down

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The integration tests wait more than they compute, so they run as two beside the rest;
# what is put behind them is what makes all three end at about the same time.
REBUILDS = ^Test(Elastic|HistoryLost|KillOther|Progress|ReaderOf|Rebuild|Redis|Refresh|Rollback|Trigger|Types)
gotest = TIDEMARK_ROUNDS=$(TIDEMARK_ROUNDS) TIDEMARK_DATA=$(TIDEMARK_DATA) go test -race -parallel 4 -timeout 20m

test: ## every test but test-client, with the race detector; starts the servers it needs
	@go test -race -run '^$$' ./integration # compiled, and once
	@$(MAKE) --no-print-directory -j3 test-rebuilds test-faults test-packages

test-rebuilds:
	$(gotest) ./integration -run '$(REBUILDS)'
	$(gotest) ./sinks/postgres

test-faults:
	$(gotest) ./integration -skip '$(REBUILDS)'
	$(gotest) ./sinks/redis

test-packages:
	$(gotest) -p $(PACKAGES) $$(go list ./... | grep -v '/integration$$\|/clienttest$$\|/sinks/postgres$$\|/sinks/redis$$')

# Its code is what go vet has compiled too, so without the race detector.
test-client: ## Elasticsearch's whole client, which takes minutes to compile: credentials, TLS
	go test ./sinks/elasticsearch/clienttest

# The demo of an example, by the example's name.
define run-demo
	@mkdir -p bin && go build -o bin/demo-$(1) ./examples/$(1)/demo
	@exec bin/demo-$(1) $(if $(SINK),-sink $(SINK))
endef

demo: ## counts per status: kill the projection in a burst of writes, lose history, compare; SINK=postgres or mongodb
	$(call run-demo,ticketcounts)

demo-rollup: ## the same with revenue per day; SINK=mongodb or postgres
	$(call run-demo,rollup)

demo-search: ## the same with a search index in Elasticsearch
	$(call run-demo,searchindex)

bench: ## throughput and latency, against real servers; 10 to 15 minutes
	go run ./integration/bench

bench-rebuild: ## how fast a model is rebuilt; about 3 minutes
	go run ./integration/bench -rebuild

lint: vet format staticcheck tidy vuln ## vet, gofumpt, staticcheck, go.mod, known vulnerabilities

vet:
	go vet ./...

format:
	@files=$$(go run $(GOFUMPT) -l .) && if [ -n "$$files" ]; then echo "gofumpt would change:"; echo "$$files"; exit 1; fi

staticcheck:
	go run $(STATICCHECK) ./...

tidy:
	go mod tidy -diff

vuln:
	@if curl -fsS --max-time 10 -o /dev/null $(VULNDB)/index/db.json 2>/dev/null; \
	then go run $(GOVULNCHECK) -db $(VULNDB) ./...; \
	else echo "govulncheck: skipped, its database $(VULNDB) can't be reached from here"; fi

services-up: ## start MongoDB and PostgreSQL and leave them running
	go run ./integration/services up mongodb postgres
	@echo 'to use them: eval "$$(go run ./integration/services env)"'

services-down: ## stop what services-up has started
	go run ./integration/services down
