use super::are_names_qualified;
use crate::config::KubernetesSettings;

fn source(namespace: Option<&str>) -> KubernetesSettings {
    KubernetesSettings {
        pods: Some("app=vllm".to_owned()),
        namespace: namespace.map(str::to_owned),
        ..KubernetesSettings::default()
    }
}

#[test]
fn names_have_their_namespace_where_there_are_several() {
    let (none, a, b) = (source(None), source(Some("a")), source(Some("b")));
    assert!(!are_names_qualified(&[]));
    assert!(!are_names_qualified(std::slice::from_ref(&a)));
    assert!(!are_names_qualified(&[a.clone(), a.clone()]));
    assert!(are_names_qualified(&[a.clone(), b]));
    assert!(are_names_qualified(&[a, none]));
}
