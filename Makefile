# Backfill. `make help` lists what can be made.

BIN      := bin
TOOLS    := $(BIN)/tools
GO       ?= go
GOFILES  := $(shell git ls-files -co --exclude-standard '*.go' 2>/dev/null | grep -v '^deploy/devserver/')
STATE    ?=
LISTEN   ?=

STATICCHECK   := honnef.co/go/tools/cmd/staticcheck@v0.8.2
WORKFLOWCHECK := go.temporal.io/sdk/contrib/tools/workflowcheck@v0.6.0

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(BIN)/backfill $(BIN)/backfill-temporal ## build bin/backfill, and the development Temporal beside it

.PHONY: backfill
backfill: $(BIN)/backfill ## build bin/backfill alone: all that an installation needs

.PHONY: $(BIN)/backfill
$(BIN)/backfill:
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GO) build -trimpath -o $@ .

# Temporal's server and console are a module of their own: they need other
# versions of things, and a first build takes minutes.
$(BIN)/backfill-temporal: $(wildcard deploy/devserver/*.go) deploy/devserver/go.mod deploy/devserver/go.sum
	@mkdir -p $(BIN)
	@echo "building the development Temporal: the first time takes 4 to 10 minutes on 2 cores, with nothing shown, later ones seconds"
	cd deploy/devserver && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o ../../$@ .

# A `temporal` on PATH serves as well.
.PHONY: temporal
temporal:
	@command -v temporal >/dev/null || $(MAKE) --no-print-directory $(BIN)/backfill-temporal

# What is missing is installed, as root on Debian, else said.
.PHONY: need-%
need-%:
	@deploy/need $*

.PHONY: demo
demo: need-postgres temporal $(BIN)/backfill ## run the demo: two databases, one missing history, and the web page
	$(BIN)/backfill dev --demo $(if $(STATE),--state $(STATE)) $(if $(LISTEN),--listen $(LISTEN))

.PHONY: demo-expand
demo-expand: need-postgres temporal $(BIN)/backfill ## a table gets a new shape while it is written and read: docs/guides/expand-contract.md
	$(GO) run ./docs/guides/expand-contract -backfill $(BIN)/backfill $(if $(LISTEN),-listen $(LISTEN)) $(if $(STAY),-stay)

.PHONY: test
test: need-postgres need-postgis need-cc need-chromium need-promtool temporal ## every test, with the race detector, on real PostgreSQL and Temporal
	CGO_ENABLED=1 $(GO) test -vet=off -race -timeout 60m ./...

# SEED is the first schedule; without it, the clock says. A failing one is printed.
SEEDS    ?= 200
SEED     ?=

.PHONY: soak
soak: need-postgres need-cc temporal ## random schedules (SEEDS=200, SEED=the first), and kill -9 at every point: for hours
	BACKFILL_SOAK=1 BACKFILL_SEEDS=$(SEEDS) BACKFILL_SEED=$(SEED) CGO_ENABLED=1 $(GO) test -race -timeout 12h -v \
		-run 'Convergence|ACrashAtAnyPoint|KillsAtAnyPoint' ./activities ./internal/acceptance

# ROWS of the workload orders, the others follow; ONLY=orders,steady runs parts (bin/bench -h lists them).
ROWS     ?= 1000000
ROUNDS   ?= 3
ONLY     ?=

.PHONY: bench
bench: need-postgres temporal $(BIN)/backfill ## measure beside COPY, upserts, logical replication, pgcopydb and Bucardo: bench/results.md
	$(GO) build -o $(BIN)/bench ./bench
	$(BIN)/bench -rows $(ROWS) -rounds $(ROUNDS) -only '$(ONLY)'

.PHONY: bench-quick
bench-quick: need-postgres temporal $(BIN)/backfill ## the same table from one round of 100,000 rows, in under two minutes: bench/quick.md
	$(GO) build -o $(BIN)/bench ./bench
	$(BIN)/bench -quick -rows 100000 -rounds 1 -duration 5 -only orders,changes,trigger,proof -out bench/quick.md
	@cat bench/quick.md

BACKFILL_IMAGE          ?= backfill
BACKFILL_TEMPORAL_IMAGE ?= backfill-temporal
BACKFILL_POSTGRES_IMAGE ?= backfill-postgres

.PHONY: image
image: ## build the container image backfill, or BACKFILL_IMAGE=name: one static program
	@mkdir -p $(BIN)/image
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(BIN)/image/backfill .
	docker build -q -f deploy/Dockerfile -t $(BACKFILL_IMAGE) $(BIN)/image

# Images for tests, of the development Temporal and of this machine's PostgreSQL: no registry is needed.
.PHONY: images
images: need-docker need-postgres image $(BIN)/backfill-temporal
	@mkdir -p $(BIN)/image/temporal/data
	cp -Lu $(BIN)/backfill-temporal $(BIN)/image/temporal/
	docker build -q -f deploy/devserver/Dockerfile -t $(BACKFILL_TEMPORAL_IMAGE) $(BIN)/image/temporal
	deploy/images/postgres $(BACKFILL_POSTGRES_IMAGE)

.PHONY: test-containers
test-containers: images ## lose hosts and cut networks, with every part in a container of its own: needs Docker, and no registry
	BACKFILL_CONTAINERS=1 BACKFILL_IMAGE=$(BACKFILL_IMAGE) BACKFILL_TEMPORAL_IMAGE=$(BACKFILL_TEMPORAL_IMAGE) BACKFILL_POSTGRES_IMAGE=$(BACKFILL_POSTGRES_IMAGE) \
		$(GO) test -count=1 -timeout 15m ./internal/containers ./internal/testkit

SITES    ?= 50
TABLES   ?= 20

.PHONY: scale
scale: need-postgres temporal ## what SITES (50) sites of TABLES (20) tables cost while idle and when little changes: docs/scale.md
	$(GO) run ./bench/scale -sites $(SITES) -tables $(TABLES)

FUZZTIME ?= 60s

.PHONY: fuzz
fuzz: ## look for inputs that break what reads input: FUZZTIME (60s) for each fuzz test
	@grep -rn '^func Fuzz' --include='*_test.go' . | sed -E 's,^\./(.*)/[^/]*:[0-9]+:func (Fuzz[A-Za-z0-9_]*).*,\1 \2,' | \
	while read -r dir name; do echo "$$dir $$name"; $(GO) test ./$$dir -run '^$$' -fuzz "^$$name$$" -fuzztime $(FUZZTIME) || exit 1; done

.PHONY: check
check: lint ## a quick look: linters, and the tests that need no server process
	$(GO) test -short ./...

.PHONY: lint
lint: $(TOOLS)/staticcheck $(TOOLS)/workflowcheck ## gofmt, go vet, staticcheck, workflowcheck, the import map
	@out=$$(gofmt -l $(GOFILES)); [ -z "$$out" ] || { echo "not gofmt-ed:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(GO) vet -tags faults ./activities
	$(TOOLS)/staticcheck ./...
	$(TOOLS)/workflowcheck ./workflows/...
	$(GO) test ./internal/arrows

$(TOOLS)/staticcheck $(TOOLS)/workflowcheck:
	@mkdir -p $(TOOLS)
	GOBIN=$(abspath $(TOOLS)) $(GO) install $(if $(findstring staticcheck,$@),$(STATICCHECK),$(WORKFLOWCHECK))

.PHONY: generate
generate: ## the Go client of the API, from api/openapi.yaml
	$(GO) generate ./api/client

.PHONY: screenshots
screenshots: need-postgres need-chromium temporal ## the pictures of the documentation; EVERY=1: every page, narrow and wide, light and dark
	$(GO) test ./ui -run TestScreenshots -count=1 -args -screenshots $(abspath docs/img) $(if $(EVERY),-every)

.PHONY: docs
docs: ## write what the documentation has from the code: docs/configuration.md
	$(GO) test . -run TestTheReferenceOfSettings -count=1 -args -update

MEASURE_ROWS ?= 1000000

.PHONY: measure
measure: need-postgres ## how long review pages take over MEASURE_ROWS (1000000) staged rows, and what 200 open pages cost
	$(GO) test ./ui -run TestMeasure -count=1 -parallel 1 -timeout 30m -args -measure -measure-rows $(MEASURE_ROWS)

# What is released is built, and looked through, with this version of Go, whatever is
# installed: what is known against the standard library of those before is mended in it.
RELEASE_GO ?= go1.26.10
vuln dist release: export GOTOOLCHAIN := $(RELEASE_GO)

.PHONY: vuln
vuln: ## known vulnerabilities in what is called; says so where their database cannot be reached
	deploy/vuln

# DIST is where they go.
DIST     ?= dist

.PHONY: dist
dist: ## static programs for linux/amd64 and arm64, each built twice and compared, with parts lists and checksums: dist
	deploy/dist $(DIST)

.PHONY: release
release: ## what dist makes, once nothing is known against it
	deploy/vuln --strict
	deploy/dist $(DIST)

.PHONY: clean
clean: ## remove what was built
	rm -rf $(BIN) $(DIST)
