//! Names of keys as they travel. Decides where an `ncclUniqueId` is looked for by each torch.

/// The key that every rank adds 1 to when it has connected (`TCPStore::waitForWorkers`). It has no `/` in front.
pub const HELLO: &str = "init/";

/// A key inside nested `PrefixStore`s, outermost first: each joins with `/`, and TCPStore puts `/` in front of all.
pub fn prefixed(prefixes: &[&str], key: &str) -> String {
    let mut joined = String::from("/");
    for prefix in prefixes {
        joined.push_str(prefix);
        joined.push('/');
    }
    joined.push_str(key);
    joined
}

/// The keys under which the ranks of a group look for the 128 raw bytes of its `ncclUniqueId`, where the group was made by
/// `init_custom_process_group(backend="nccl", group_name=...)` of SGLang 0.5.23 or LMDeploy 0.18: first that of the classic
/// ProcessGroupNCCL (torch 2.9 to 2.14, and `nccl-legacy`), then that of nccl2 (torch 2.14 by choice, 2.15). Set both.
pub fn nccl_id_keys(group: &str) -> [String; 2] {
    let inner = format!("{group}/");
    [prefixed(&[group, &inner, "cuda/"], "0"), prefixed(&[group, &inner, "cuda/", group], "nccl_storekey_0")]
}
