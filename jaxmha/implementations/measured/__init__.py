"""Tables that `jaxmha bench --save` wrote on other machines, for users who have none of their
own."""
