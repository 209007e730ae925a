# Backfill. `make help` lists what can be made.

BIN      := bin
TOOLS    := $(BIN)/tools
GO       ?= go
GOFILES  := $(shell git ls-files -co --exclude-standard '*.go' 2>/dev/null | grep -v '^deploy/devserver/')
STATE    ?=

STATICCHECK   := honnef.co/go/tools/cmd/staticcheck@v0.8.2
WORKFLOWCHECK := go.temporal.io/sdk/contrib/tools/workflowcheck@v0.6.0

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: $(BIN)/backfill $(BIN)/backfill-temporal ## build bin/backfill, and the development Temporal beside it

.PHONY: $(BIN)/backfill
$(BIN)/backfill:
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GO) build -trimpath -o $@ .

# Temporal's server and console are a module of their own: they need other
# versions of things, and a first build takes minutes.
$(BIN)/backfill-temporal: $(wildcard deploy/devserver/*.go) deploy/devserver/go.mod deploy/devserver/go.sum
	@mkdir -p $(BIN)
	@echo "building the development Temporal: the first time takes about 4 minutes on 2 cores, later ones seconds"
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
	$(BIN)/backfill dev --demo $(if $(STATE),--state $(STATE))

.PHONY: test
test: need-postgres need-cc need-chromium temporal ## every test, with the race detector, on real PostgreSQL and Temporal
	CGO_ENABLED=1 $(GO) test -race -timeout 25m ./...

.PHONY: check
check: lint ## a quick look: linters, and the tests that need no server process
	$(GO) test -short ./...

.PHONY: lint
lint: $(TOOLS)/staticcheck $(TOOLS)/workflowcheck ## gofmt, go vet, staticcheck, workflowcheck, the import map
	@out=$$(gofmt -l $(GOFILES)); [ -z "$$out" ] || { echo "not gofmt-ed:"; echo "$$out"; exit 1; }
	$(GO) vet ./...
	$(TOOLS)/staticcheck ./...
	$(TOOLS)/workflowcheck ./workflows/...
	$(GO) test ./internal/arrows

$(TOOLS)/staticcheck $(TOOLS)/workflowcheck:
	@mkdir -p $(TOOLS)
	GOBIN=$(abspath $(TOOLS)) $(GO) install $(if $(findstring staticcheck,$@),$(STATICCHECK),$(WORKFLOWCHECK))

.PHONY: screenshots
screenshots: need-postgres need-chromium ## pictures of every page, into docs/img (needs Chromium)
	$(GO) test ./ui -run TestScreenshots -args -screenshots $(abspath docs/img)

.PHONY: clean
clean: ## remove what was built
	rm -rf $(BIN)
