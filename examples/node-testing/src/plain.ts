/** An Envoy that balances as one does without kvlane. */
export function plainEnvoy(policy: 'ROUND_ROBIN' | 'RANDOM', endpoints: string[]): string {
  const hosts = endpoints.map((endpoint) => {
    const [address, port] = endpoint.split(':')
    return `- endpoint: { address: { socket_address: { address: ${address}, port_value: ${port} } } }`
  })
  return `
admin:
  address: { socket_address: { address: 127.0.0.1, port_value: 9901 } }
static_resources:
  listeners:
  - name: gateway
    address: { socket_address: { address: 127.0.0.1, port_value: 10000 } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          route_config:
            virtual_hosts:
            - { name: all, domains: ["*"], routes: [{ match: { prefix: "/" }, route: { cluster: engines, timeout: 0s } }] }
          http_filters:
          - name: envoy.filters.http.router
            typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }
  clusters:
  - name: engines
    type: STATIC
    lb_policy: ${policy}
    load_assignment:
      cluster_name: engines
      endpoints:
      - lb_endpoints:
        ${hosts.join('\n        ')}
`
}
