VERSION := 1.0.0
# The build tag leaves out HTTP/2, which nothing here speaks.
BUILD = CGO_ENABLED=0 go build -trimpath -buildvcs=false -ldflags '-s -w -X main.version=$(VERSION)'
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: build test lint clean

build: ## The static binary ./pg-status for this machine
	$(BUILD) -o pg-status .

test: ## All that CI runs: unit and e2e tests
	go test ./...

lint: ## Formatting, vet, staticcheck, the platforms we build for
	test -z "$$(gofmt -l .)"
	go vet ./...
	$(STATICCHECK) ./...

clean: ## Remove what the other targets made
	rm -rf pg-status dist
