"""Files that `jaxmha bench --save` wrote on other machines, for calls that users have not timed."""
