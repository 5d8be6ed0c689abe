VERSION = 1.0.0
# HTTP/2 is left out: nothing here speaks it.
BUILD = CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags nethttpomithttp2 -ldflags '-s -w -X main.version=$(VERSION)'
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2

SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
DIST ?= dist
PLATFORMS = linux-amd64 linux-arm64 darwin-amd64 darwin-arm64
BENCH = full
RUN =
SOAK = 10m
FUZZTIME = 30s

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

build: ## The static binary ./pg-status for this machine
	$(BUILD) -o pg-status .

demo: build ## A primary, two replicas and pg-status, until Ctrl-C
	packaging/demo.sh

test: ## All that CI runs: unit tests with the race detector, and e2e tests
	CGO_ENABLED=1 go test -race .
	go test -count=1 -timeout 20m ./e2e

lint: cross ## Formatting, vet, staticcheck, and that every platform builds
	test -z "$$(gofmt -l .)"
	go vet ./...
	$(STATICCHECK) ./...

cross: ## The other platforms build
	GOOS=linux GOARCH=arm64 $(BUILD) -o /dev/null .
	GOOS=darwin GOARCH=amd64 $(BUILD) -o /dev/null .
	GOOS=darwin GOARCH=arm64 $(BUILD) -o /dev/null .
	GOOS=darwin go vet ./...

bench: build ## The numbers of README.md, about 10 minutes; BENCH=short to try it, RUN=Quota for one of them
	BENCH=$(BENCH) PG_STATUS=$(CURDIR)/pg-status go test ./e2e -run '^TestBench$(RUN)' -count=1 -timeout 60m -v

measure: build ## The speed of failovers and of reads right after a write, as README.md has them
	FAILOVERS=30 FRESH_READS=20000 PG_STATUS=$(CURDIR)/pg-status go test ./e2e \
		-run '^Test(InstantFailover|FailoverFromFrozenMaster|FreshReads)$$' -count=1 -timeout 30m -v

soak: build ## Faults under traffic for SOAK=10m; SOAK_SEED=N repeats a schedule of faults
	SOAK_TIME=$(SOAK) PG_STATUS=$(CURDIR)/pg-status go test ./e2e -run '^TestSoak$$' -count=1 -timeout 24h -v

fuzz: ## Every fuzz target for FUZZTIME=30s
	for f in $$(grep -ho 'func Fuzz[A-Za-z]*' *_test.go | cut -c6-); do \
		go test -run XXX -fuzz "^$$f$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x . || exit; \
	done

test-matrix: ## The e2e tests on PostgreSQL 13 and 17, in trees of other Debian releases, as root
	packaging/test-matrix.sh

dist: $(PLATFORMS:%=$(DIST)/pg-status-%) ## Every package, into dist/
	packaging/dist.sh $(DIST) $(VERSION)

$(DIST)/pg-status-%: FORCE
	GOOS=$(word 1,$(subst -, ,$*)) GOARCH=$(word 2,$(subst -, ,$*)) $(BUILD) -o $@ .

test-packaging: dist ## The packages, as root on Debian: boots a system, builds an image
	packaging/test.sh $(DIST) $(VERSION)

clean: ## Remove what the other targets made
	rm -rf pg-status dist

FORCE:
.PHONY: help build demo test lint cross bench measure soak fuzz test-matrix dist test-packaging clean FORCE
